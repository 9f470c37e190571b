"""The only callers of torch.distributed: groups, the wire, agreement before a step, the ledger of what was sent."""
