"""vLLM's Rust front end beside ours."""
