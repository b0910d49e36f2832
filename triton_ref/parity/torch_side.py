"""The Triton path of a comparison: `python -m triton_ref.parity.torch_side WORK DTYPE`."""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from triton_ref.adapter import load_adapter
from triton_ref.checkpoint import Folder
from triton_ref.config import read_config
from triton_ref.model import Decoder, load_decoder
from triton_ref.ops import KERNELS, Ops
from triton_ref.packing import Packed, unpad
from triton_ref.parity.job import BATCHES, Job, in_one_line, result_file
from triton_ref.parity.tensors import matrix_rows
from triton_ref.record import Recorder
from triton_ref.step import make_optimizer, update


def run(work: Path, dtype: str, ops: Ops = KERNELS) -> Path:
    """Record the first batch's step, then take the optimiser steps; the result's file."""
    job = Job.load(work)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = Path(job.model)
    decoder = load_decoder(
        Folder(folder),
        read_config(folder, job.max_length),
        load_adapter(Path(job.adapter)),
        ops=ops,
        dtype=getattr(torch, dtype),
        device=device,
        load_in_4bit=job.load_in_4bit,
        nested=job.nested,
    )
    batches = load_file(work / BATCHES, device=str(device))
    result = _weights(decoder) | _step(decoder, _packed(batches, 0), job)
    result |= _steps(decoder, [_packed(batches, i) for i in range(job.steps)], job)
    path = result_file(work, "torch", dtype)
    save_file({name: tensor.contiguous() for name, tensor in result.items()}, path)
    return path


def _packed(batches: dict[str, torch.Tensor], number: int) -> Packed:
    names = ("tokens", "segment_ids", "targets")
    return unpad(*(batches[name][number] for name in names))


def _weights(decoder: Decoder) -> dict[str, torch.Tensor]:
    found = {}
    for projection in decoder.projections():
        dense = projection.dense(decoder.dtype)
        found[f"weight/{projection.path}"] = dense[matrix_rows(len(dense))].float().cpu()
    return found


def _step(decoder: Decoder, packed: Packed, job: Job) -> dict[str, torch.Tensor]:
    record = Recorder(torch.tensor(job.tokens, device=packed.tokens.device))
    loss = decoder.losses(packed, record)
    loss.sum().backward()
    count = int((packed.targets >= 0).sum())
    found = {f"value/{name}": tensor for name, tensor in record.values.items()}
    found |= {f"gradient/{name}": tensor for name, tensor in record.gradients.items()}
    found["loss"] = loss.detach().double().sum(0, keepdim=True).cpu()
    del found["gradient/nll"]  # ones
    for module, pair in decoder.adapters().items():
        for part, parameter in zip("AB", pair, strict=True):
            assert parameter.grad is not None
            found[f"lora/{module}.{part}"] = parameter.grad.cpu() / count
    return found


def _steps(decoder: Decoder, batches: list[Packed], job: Job) -> dict[str, torch.Tensor]:
    optimizer = make_optimizer(decoder, job.learning_rate, job.weight_decay)
    updates = [update(decoder, optimizer, packed, job.max_grad_norm) for packed in batches]
    found = {
        "losses": torch.tensor([u.loss for u in updates], dtype=torch.float64),
        "grad_norms": torch.tensor([u.grad_norm for u in updates], dtype=torch.float64),
    }
    for module, pair in decoder.adapters().items() if updates else ():
        for part, parameter in zip("AB", pair, strict=True):
            found[f"trained/{module}.{part}"] = parameter.detach().cpu()
    return found


if __name__ == "__main__":
    in_one_line(run, (ValueError, OSError), sys.argv[1:])
