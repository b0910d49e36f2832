"""The decoder of every supported family in torch, on the kernels of this package."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from triton_ref.adapter import Pair
from triton_ref.checkpoint import Folder
from triton_ref.config import Config, Layer
from triton_ref.kernels.nf4 import NF4, quantize
from triton_ref.ops import Ops
from triton_ref.packing import Packed
from triton_ref.record import Silent

PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


class _Frozen(torch.autograd.Function):
    """`x W^T` with a frozen W; what is kept for the backward pass is W as it is stored."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, dense: Callable[[torch.dtype], torch.Tensor]) -> torch.Tensor:
        ctx.dense = dense
        return x @ dense(x.dtype).T

    @staticmethod
    def backward(ctx, dy: torch.Tensor):
        return dy @ ctx.dense(dy.dtype), None


class Projection(nn.Module):
    """A frozen matrix with its adapter.

    Attributes:
      path: of the module in the checkpoint.
      weight: codes, or a tensor `[out, in]`.
      bias: `[out]`, or None.
      lora_A, lora_B: float32 masters, cast to x's dtype at use; None without an adapter.
    """

    def __init__(
        self,
        path: str,
        weight: torch.Tensor | NF4,
        bias: torch.Tensor | None,
        pair: Pair | None,
        dequantize: Callable,
    ):
        super().__init__()
        self.path = path
        self.weight, self.bias, self._dequantize = weight, bias, dequantize
        self.lora_A = None if pair is None else nn.Parameter(pair.a.clone())
        self.lora_B = None if pair is None else nn.Parameter(pair.b.clone())
        self.scale = 0.0 if pair is None else pair.scale

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The frozen matrix `[out, in]`."""
        if isinstance(self.weight, NF4):
            return self._dequantize(self.weight, dtype)
        return self.weight.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, in]` -> `[N, out]`."""
        y = _Frozen.apply(x, self.dense)
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        if self.lora_A is None or self.lora_B is None:
            return y
        a, b = self.lora_A.to(x.dtype), self.lora_B.to(x.dtype)
        return y + (x @ a.T) @ b.T * self.scale


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each added to the stream."""

    def __init__(
        self,
        config: Config,
        layer: Layer,
        ops: Ops,
        projections: Mapping[str, Projection],
        norms: Mapping[str, torch.Tensor],
        name: str,
    ):
        super().__init__()
        self.config, self.layer, self.ops, self.name = config, layer, ops, name
        self.projections = nn.ModuleDict({k.rpartition(".")[2]: v for k, v in projections.items()})
        self.norms = norms

    def forward(self, x: torch.Tensor, packed: Packed, record: Silent) -> torch.Tensor:
        """`[N, hidden]` -> `[N, hidden]`."""

        def keep(name: str, tensor: torch.Tensor) -> torch.Tensor:
            return record(f"{self.name}.{name}", tensor)

        x = keep("layer_input", x)
        normed, _ = self._norm("input_layernorm", x)
        attended = self._attention(keep("input_norm", normed), packed, keep)
        if self.config.post_norms:
            attended, _ = self._norm("post_attention_layernorm", attended)
            normed, x = self._norm("pre_feedforward_layernorm", attended, x)
        else:
            normed, x = self._norm("post_attention_layernorm", attended, x)
        wide = self._feed_forward(keep("mlp_norm", normed), keep)
        if self.config.post_norms:
            wide, _ = self._norm("post_feedforward_layernorm", wide)
        return x + wide

    def _norm(self, name: str, x: torch.Tensor, residual: torch.Tensor | None = None):
        form, eps = self.config.norm_form, self.config.eps
        return self.ops.rms_norm(x, self.norms[name], eps=eps, form=form, residual=residual)

    def _attention(self, x: torch.Tensor, packed: Packed, keep: Callable) -> torch.Tensor:
        config = self.config
        q, k, v = (
            keep(name, self.projections[f"{name}_proj"](x).view(len(x), -1, config.head_dim))
            for name in "qkv"
        )
        norms = {}
        if config.qk_norm:
            norms = {
                "q_scale": self.norms["self_attn.q_norm"],
                "k_scale": self.norms["self_attn.k_norm"],
                "eps": config.eps,
                "norm_offset": 1.0 if config.norm_form == "gemma" else 0.0,
            }
        q, k = self.ops.qk_norm_rope(
            q,
            k,
            packed.positions,
            self.layer.inv_freq.to(x.device),
            attention_factor=self.layer.attention_factor,
            **norms,
        )
        out = self.ops.attention(
            keep("q_rotated", q),
            keep("k_rotated", k),
            v,
            packed.cu_seqlens,
            packed.max_seqlen,
            scale=config.scale,
            window=self.layer.window,
            softcap=config.attention_softcap,
        )
        return keep("o", self.projections["o_proj"](keep("attention", out).reshape(len(x), -1)))

    def _feed_forward(self, x: torch.Tensor, keep: Callable) -> torch.Tensor:
        gate = keep("gate", self.projections["gate_proj"](x))
        up = keep("up", self.projections["up_proj"](x))
        wide = keep("glu", self.ops.glu(gate, up, self.config.activation))
        return keep("down", self.projections["down_proj"](wide))


class Decoder(nn.Module):
    """Tokens to hidden states and losses. The adapters are its only parameters."""

    def __init__(self, config: Config, ops: Ops, dtype: torch.dtype, layers: list[DecoderLayer]):
        super().__init__()
        self.config, self.ops, self.dtype = config, ops, dtype
        self.layers = nn.ModuleList(layers)
        self.embedding = self.head = self.norm = torch.empty(0)

    def hidden(self, packed: Packed, record: Silent) -> torch.Tensor:
        """`[N, hidden]`, after the last norm."""
        x = self.embedding[packed.tokens].to(self.dtype)
        if self.config.embedding_scale is not None:
            x = x * torch.tensor(self.config.embedding_scale, dtype=self.dtype, device=x.device)
        x.requires_grad_()  # so that gradients are seen down to the first layer's input
        for layer in self.layers:
            x = layer(x, packed, record)
        x = record("stream", x)
        form, eps = self.config.norm_form, self.config.eps
        return record("hidden", self.ops.rms_norm(x, self.norm, eps=eps, form=form)[0])

    def losses(self, packed: Packed, record: Silent | None = None) -> torch.Tensor:
        """float32 `[N]`: each target's negative log-likelihood; 0 where there is none."""
        record = record or Silent()
        hidden = self.hidden(packed, record)
        cap = self.config.final_softcap
        losses = self.ops.linear_cross_entropy(hidden, self.head, packed.targets, softcap=cap)
        return record("nll", losses)

    def adapters(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """A and B by module path."""
        return {
            projection.path: (projection.lora_A, projection.lora_B)
            for projection in self.projections()
            if projection.lora_A is not None and projection.lora_B is not None
        }

    def projections(self) -> Iterator[Projection]:
        """All of them, layer by layer."""
        return (module for module in self.modules() if isinstance(module, Projection))


def load_decoder(
    folder: Folder,
    config: Config,
    pairs: Mapping[str, Pair],
    *,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    load_in_4bit: bool = True,
    nested: bool = True,
) -> Decoder:
    """The model of a folder with an adapter, its projections quantised to NF4 if asked for.

    Codes that the folder holds already are kept, and with them what it has in more bits.
    Embeddings, head and norms have the arithmetic's dtype.

    Raises:
      KeyError: a tensor that the folder lacks.
      ValueError: an adapter for a module that the model does not have, or weights that are not
        finite.
    """
    unused = set(pairs)

    def other(name: str) -> torch.Tensor:
        return folder.dense(name).to(device, dtype)

    def projection(path: str) -> Projection:
        unused.discard(path)
        pair = pairs.get(path)
        weight = folder.matrix(f"{path}.weight").to(device)
        if isinstance(weight, torch.Tensor) and load_in_4bit and not folder.quantized:
            try:
                weight = quantize(weight, nested=nested)
            except ValueError as error:
                raise ValueError(f"{path}.weight: {error}") from None
        bias = other(f"{path}.bias") if f"{path}.bias" in folder else None
        if pair is not None:
            pair = Pair(pair.a.to(device), pair.b.to(device), pair.scale)
        return Projection(path, weight, bias, pair, ops.dequantize)

    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] * config.post_norms
    norms += ["self_attn.q_norm", "self_attn.k_norm"] * config.qk_norm
    layers = []
    for number, layer in enumerate(config.layers):
        name = f"model.layers.{number}"
        layers.append(
            DecoderLayer(
                config,
                layer,
                ops,
                {path: projection(f"{name}.{path}") for path in PROJECTIONS},
                {norm: other(f"{name}.{norm}.weight") for norm in norms},
                name,
            )
        )
    if unused:
        raise ValueError(f"the adapter's module {min(unused)} is none of the model's projections")
    decoder = Decoder(config, ops, dtype, layers)
    decoder.embedding = other("model.embed_tokens.weight")
    decoder.norm = other("model.norm.weight")
    head = "lm_head.weight"
    decoder.head = other(head) if head in folder else decoder.embedding
    return decoder
