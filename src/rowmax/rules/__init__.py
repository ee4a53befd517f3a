"""The mathematics, each rule once."""
