"""What a fine-tuning loop needs beside the model: data, loss, adapters, checkpoints, records, loading.

None of it is reached by the remote code that sits beside the weights, and nothing here names a model class:
the class that was loaded may be the remote copy, so modules are recognised by their attributes.
"""
