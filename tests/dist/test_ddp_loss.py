"""The loss rule on several processes: 1 or 2 of them, 1, 2 or 4 micro-batches, uneven tokens, same
gradients."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from modeling_latentmoe.training.loss import IGNORE

pytestmark = pytest.mark.dist

# Each process takes every WORLD_SIZE-th micro-batch of the same eight documents.
WORKER = """
import json, sys
import torch
from accelerate import Accelerator
from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.training import lora
from modeling_latentmoe.training.data import Sample, pack, pad
from modeling_latentmoe.training.loss import backpropagate, count_loss_tokens, global_sum

torch.set_num_threads(1)
parts, out, packing = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "packed"
documents = [Sample(ids, labels) for ids, labels in torch.load(sys.argv[4])]
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = LatentMoEForConditionalGeneration(LatentMoEConfig.tiny(vision=False))
model = lora.add_adapter(model, r=4, lora_alpha=8, expert_rank=2)
torch.manual_seed(1)
for name, parameter in model.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(parameter, std=0.1)
trained = [p for p in model.parameters() if p.requires_grad]
wrapped = accelerator.prepare(model)

n = accelerator.num_processes * parts
groups = [documents[i * len(documents) // n : (i + 1) * len(documents) // n] for i in range(n)]
mine = groups[accelerator.process_index :: accelerator.num_processes]
window = [pack(group) if packing else pad(group, 0) for group in mine]
tokens, = global_sum(accelerator, sum(count_loss_tokens(batch["labels"]) for batch in window))
loss, load, *_ = backpropagate(accelerator, wrapped, window, tokens, 1)
norm = accelerator.clip_grad_norm_(trained, 1e9)
manual = torch.cat([p.grad.flatten().double() for p in trained]).norm()
torch.save({"loss": loss, "norm": float(norm), "manual": float(manual), "tokens": tokens, "load": load,
            "gradients": {name: p.grad for name, p in model.named_parameters() if p.requires_grad}},
           f"{out}.{accelerator.process_index}")
wrapped, = accelerator.free_memory(wrapped)
accelerator.end_training()
"""


def run(processes: int, parts: int, layout: str, folder: Path) -> list[dict]:
    """What every process of one run saved."""
    script, out = folder / "worker.py", folder / f"{processes}-{parts}-{layout}"
    script.write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    command += ["--master_port", "0", "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", str(script)]
    command += [str(parts), str(out), layout, str(folder / "documents.pt")]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(f"{out}.{rank}") for rank in range(processes)]


def test_processes_and_accumulation_change_nothing(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    documents = []
    # the last documents train one token each: halves and quarters hold very different numbers of tokens
    for n, trained in ((20, 17), (18, 15), (16, 12), (14, 9), (12, 1), (10, 1), (8, 1), (6, 1)):
        ids = torch.randint(0, 256, (n,), generator=generator)
        labels = ids.clone()
        labels[: n - trained] = IGNORE
        documents.append((ids, labels))
    torch.save(documents, tmp_path / "documents.pt")

    (reference,) = run(1, 1, "padded", tmp_path)
    assert reference["tokens"] == 57
    table = []
    for processes, parts, layout in ((1, 4, "packed"), (2, 1, "padded"), (2, 2, "packed")):
        for rank, result in enumerate(run(processes, parts, layout, tmp_path)):
            assert result["tokens"] == 57
            assert result["loss"] == pytest.approx(reference["loss"], abs=1e-6)
            assert result["norm"] == pytest.approx(reference["norm"], abs=1e-6)
            assert result["norm"] == pytest.approx(result["manual"], rel=1e-5)
            assert torch.equal(result["load"], reference["load"])
            largest = 0.0
            for name, gradient in reference["gradients"].items():
                difference = (result["gradients"][name] - gradient).abs().max().item()
                largest = max(largest, difference)
                assert difference <= 1e-6, f"{name} on {rank} of {processes} x {parts}: {difference}"
            table.append((processes, parts, layout, rank, result["loss"] - reference["loss"], largest))
    print(json.dumps(table))
