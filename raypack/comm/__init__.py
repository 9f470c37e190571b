"""What ranks meet by: groups, the wire, agreement before a step, the ledger of what was sent."""
