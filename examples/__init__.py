"""The tiny example model, its adapters and the code that made them; not a part of the product."""
