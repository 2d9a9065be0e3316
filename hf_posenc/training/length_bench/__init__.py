"""Small decoders trained from nothing on tasks whose answer is known, and read at lengths that they have not seen."""
