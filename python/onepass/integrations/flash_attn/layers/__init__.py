"""flash_attn.layers: rotary embedding."""
