"""The maths and data that everything else is made of: no model in sight."""
