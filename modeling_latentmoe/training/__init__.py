"""What a fine-tuning loop needs beside the model: data, loss, adapters, checkpoints, records, loading.

None of it is reached by the remote code that sits beside the weights. The class of a loaded model may be the remote
copy, so its modules are recognised by their attributes; our own classes only make models from a config, as for checks.
"""
