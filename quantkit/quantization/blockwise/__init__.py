"""Run methods with calibration data, one decoder block after the other."""
