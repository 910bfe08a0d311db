"""flash_attn.ops.triton.rotary: `apply_rotary`, in plain PyTorch."""

from onepass.integrations.flash_attn.layers.rotary import apply_rotary

__all__ = ["apply_rotary"]
