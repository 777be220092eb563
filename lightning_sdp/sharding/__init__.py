"""A carved model whose parameters are sharded over their holders by torch's FSDP2."""
