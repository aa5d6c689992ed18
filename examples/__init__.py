"""The tiny example model, its adapters and the code that made them; not part of the product."""
