"""Studies: variants of a recipe, trained with several seeds, measured and compared."""
