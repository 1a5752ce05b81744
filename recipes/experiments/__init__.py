"""The papers' experiments: each file runs one, resumes it, and writes its table and plot."""
