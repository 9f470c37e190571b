"""What a person sees of a run, from its records: the live view, tables, the HTML page, pictures of plans."""
