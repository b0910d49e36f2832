"""The other side of the parity test: transformers, PEFT and torch alone, one document at a time.

Nothing of jaxft is used here. A document is a forward pass of its own: there is no row, no mask
and no position that packing could get wrong in the same way twice.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

IGNORED = -100


@dataclass(frozen=True)
class Document:
    """Token ids [n] and labels [n] in transformers' sense: not shifted, -100 where none."""

    ids: torch.Tensor
    labels: torch.Tensor

    @property
    def targets(self) -> int:
        return int((self.labels != IGNORED).sum())


@dataclass(frozen=True)
class Update:
    """What one optimiser step saw."""

    loss: float
    grad_norm: float
    learning_rate: float


def chatml_document(row: Mapping[str, Any], tokenizer: Any) -> Document:
    """A chat of ChatML whose last turn is the answer: that turn and its <|im_end|> are labels."""
    ids = list(tokenizer.apply_chat_template(row["messages"], tokenize=True)["input_ids"])
    opening = tokenizer("<|im_start|>assistant\n").input_ids
    starts = [i for i in range(len(ids)) if ids[i : i + len(opening)] == opening]
    start = starts[-1] + len(opening)
    end = ids.index(tokenizer.convert_tokens_to_ids("<|im_end|>"), start) + 1
    labels = [IGNORED] * start + ids[start:end] + [IGNORED] * (len(ids) - end)
    return Document(torch.tensor(ids), torch.tensor(labels))


def llama(config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> LlamaForCausalLM:
    """float32 model of a config.json's content and the tensors named in it."""
    model = LlamaForCausalLM(LlamaConfig(**config)).eval()
    state = {name: torch.from_numpy(array) for name, array in weights.items()}
    result = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    assert result.unexpected_keys == []
    assert set(result.missing_keys) <= tied
    return model


def with_adapters(
    model: LlamaForCausalLM,
    adapters: Mapping[str, tuple[np.ndarray, np.ndarray]],
    **config: Any,
) -> PeftModel:
    """PEFT's own model on a copy of `model`, starting from these A and B."""
    peft = get_peft_model(copy.deepcopy(model), LoraConfig(task_type="CAUSAL_LM", **config))
    assert len(adapters) == sum(hasattr(module, "lora_A") for module in peft.modules())
    with torch.no_grad():
        for path, pair in adapters.items():
            module = peft.get_submodule(f"base_model.model.{path}")
            for part, array in zip("AB", pair, strict=True):
                weight = getattr(module, f"lora_{part}")["default"].weight
                assert weight.shape == array.shape
                weight.copy_(torch.tensor(array))
    return peft


def adapter_weights(peft: PeftModel) -> dict[str, np.ndarray]:
    """A and B under the names that PEFT stores them by."""
    return {
        name.replace(".default.", "."): parameter.detach().numpy().copy()
        for name, parameter in peft.named_parameters()
        if "lora_" in name
    }


def sum_of_losses(model: torch.nn.Module, document: Document) -> torch.Tensor:
    """Negative log-likelihood of a document's labels, added up.

    In float64 from the logits on: torch's float32 sums over 49,152 logits are 2e-6 too low.
    """
    logits = model(input_ids=document.ids[None]).logits[0].double()
    return cross_entropy(logits[:-1], document.labels[1:], ignore_index=IGNORED, reduction="sum")


def mean_loss(model: torch.nn.Module, documents: Iterable[Document]) -> float:
    """Mean over all labels of the documents."""
    documents = list(documents)
    with torch.no_grad():
        total = sum(float(sum_of_losses(model, document)) for document in documents)
    return total / sum(document.targets for document in documents)


def concatenated_loss(model: torch.nn.Module, documents: Sequence[Document]) -> float:
    """The fault that packing is prone to: documents laid end to end see their predecessors."""
    row = Document(
        *(torch.cat([getattr(d, name) for d in documents]) for name in ("ids", "labels"))
    )
    return mean_loss(model, [row])


def backward(
    model: torch.nn.Module, documents: Iterable[Document], weights: Iterable[float]
) -> tuple[float, float]:
    """Weighted sum of the documents' losses, and the norm of its gradient, which is left in place.

    The weight of a document multiplies the sum of its token losses. The norm is taken in float64:
    over two million elements torch's float32 norm is 3e-4 too low.
    """
    model.zero_grad()
    total = 0.0
    for document, weight in zip(documents, weights, strict=True):
        loss = weight * sum_of_losses(model, document)
        loss.backward()
        total += loss.item()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return total, torch.cat(gradients).double().norm().item()


def train(
    model: PeftModel,
    batches: Sequence[Sequence[Document]],
    *,
    learning_rate: float,
    weight_decay: float,
    max_grad_norm: float,
    schedule: str,
) -> list[Update]:
    """AdamW on the adapters, one update a batch; `model` is trained in place."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=weight_decay)
    scheduler = get_scheduler(
        schedule, optimizer, num_warmup_steps=0, num_training_steps=len(batches)
    )
    updates = []
    for documents in batches:
        count = sum(document.targets for document in documents)
        loss, norm = backward(model, documents, [1 / count] * len(documents))
        torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        updates.append(Update(loss, norm, scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return updates
