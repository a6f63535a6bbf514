"""Scripts as they were last reviewed; `python -m tests.codegen.golden` remakes them."""
