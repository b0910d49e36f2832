"""What a run will train on, in numbers, for the report before it starts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxft.data.examples import OverflowReport
from jaxft.data.loader import Loader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Statistics:
    """Numbers of one epoch.

    documents: those trained. dropped, truncated: longer than the limit and left out (also where a
    cut would have left no target) or cut. tokens, supervised: their sum and the targets among
    them. packing_efficiency: share of the positions that hold a token. longest, longest_origin:
    the longest document trained. endings: text of a document's last label and the share of the
    documents that end so, the most frequent first; an end of turn or of sequence should be there.
    ends: ids of the special and added tokens that are the last label of a document, cut ones aside.
    """

    documents: int
    dropped: int
    truncated: int
    tokens: int
    supervised: int
    packing_efficiency: float
    rows_per_epoch: int
    steps_per_epoch: int
    longest: int
    longest_origin: str
    endings: tuple[tuple[str, float], ...]
    ends: tuple[int, ...]

    @property
    def supervised_share(self) -> float:
        """Targets per token."""
        return self.supervised / self.tokens


def statistics(
    loader: Loader,
    tokenizer: PreTrainedTokenizerFast,
    overflow: OverflowReport | None = None,
    most: int = 3,
) -> Statistics:
    """Statistics of a loader's examples, with the `most` frequent endings."""
    overflow = overflow or OverflowReport()
    examples = loader.examples
    labels = [int(e.input_ids[e.supervised.nonzero()[0][-1]]) for e in examples]
    last = Counter(labels)
    # every cut document has the greatest length; where nothing was cut, none is left out
    cut = int(loader.lengths.max()) if overflow.truncated else None
    ends = {label for label, e in zip(labels, examples, strict=True) if len(e) != cut}
    longest = max(examples, key=len)
    return Statistics(
        documents=len(examples),
        dropped=overflow.dropped + overflow.emptied,
        truncated=overflow.truncated,
        tokens=int(loader.lengths.sum()),
        supervised=sum(int(example.supervised.sum()) for example in examples),
        packing_efficiency=loader.packing_efficiency,
        rows_per_epoch=loader.rows_per_epoch,
        steps_per_epoch=loader.steps_per_epoch,
        longest=len(longest),
        longest_origin=longest.origin,
        endings=tuple(
            (str(tokenizer.decode([token])), count / len(examples))
            for token, count in last.most_common(most)
        ),
        ends=tuple(sorted(ends & tokenizer.added_tokens_decoder.keys())),
    )
