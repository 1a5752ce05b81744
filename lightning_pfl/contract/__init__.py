"""What a method, an engine and a callback say to each other."""
