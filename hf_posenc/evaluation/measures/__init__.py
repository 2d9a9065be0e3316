"""What is measured of one model at one length."""
