"""Code that several methods share, and the auxiliary parts of single methods."""
