"""What a decoder looks like: the shapes and the arithmetic in which families differ."""

from dataclasses import dataclass

from jaxft.model.rope import Rope


@dataclass(frozen=True)
class LayerConfig:
    """What may differ from layer to layer; patterns that repeat are scanned together.

    Attributes:
      rope: rotary embedding.
      window: how many tokens a query sees, itself included; None for its whole document.
    """

    rope: Rope
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and arithmetic of a decoder, under transformers' names where it has them.

    Attributes:
      attention_scale: factor on the scores before the softmax.
      attention_softcap: scores become `cap * tanh(score / cap)`; None leaves them.
      final_softcap: the same for the logits.
      embedding_scale: factor on the embeddings, rounded to the arithmetic's dtype.
      activation: of the gate, `"silu"` or `"gelu_tanh"`.
      norm_offset: added to every norm's scale.
      qk_norm: queries and keys are normalised per head before RoPE.
      post_norms: attention and feed-forward are normalised after as well as before.
      qkv_bias, o_bias, mlp_bias: which projections have a bias.
      module_prefix: path of the decoder in transformers' model; adapters are named by it.
      left_alone: prefixes of tensors that belong to other parts of the checkpoint (vision).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    layers: tuple[LayerConfig, ...]
    attention_scale: float
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float | None = None
    activation: str = "silu"
    norm_offset: float = 0.0
    qk_norm: bool = False
    post_norms: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    module_prefix: str = "model"
    left_alone: tuple[str, ...] = ()

    @property
    def module_paths(self) -> dict[str, tuple[int, tuple[int, int]]]:
        """Layer and shape (out, in) of every projection, by its path in transformers' model."""
        return {
            f"{self.layer_path(number)}.{path}": (number, shape)
            for number in range(len(self.layers))
            for path, shape in self.projections.items()
        }

    @property
    def length_limit(self) -> int | None:
        """Longest text that the model can read; None where its RoPE grows with the length."""
        return (
            None if any(layer.rope.grows for layer in self.layers) else self.max_position_embeddings
        )

    def layer_path(self, number: int) -> str:
        """Path of a layer in transformers' model."""
        return f"{self.module_prefix}.layers.{number}"

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Shape (out, in) of each projection of a layer, by its path in the layer."""
        hidden, wide = self.hidden_size, self.intermediate_size
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
        }
