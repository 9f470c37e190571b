"""The subcommands of `raypack`, one file each."""
