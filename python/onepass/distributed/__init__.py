"""One sequence on several processes: context parallelism for attention."""

from onepass.distributed.attention import ring_attention
from onepass.distributed.sequence import gather_sequence, shard_sequence

__all__ = ["gather_sequence", "ring_attention", "shard_sequence"]
