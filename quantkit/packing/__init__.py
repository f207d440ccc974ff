"""Number formats, schemes and words: numbers <-> bytes. Nothing here knows a method, a kernel or a file."""
