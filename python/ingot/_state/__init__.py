"""Training states: trees of values and tensors in one file, without pickle. Used by modules of frameworks."""
