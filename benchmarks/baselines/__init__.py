"""Other methods of sequence parallelism, for comparison only: nothing in raypack uses them."""
