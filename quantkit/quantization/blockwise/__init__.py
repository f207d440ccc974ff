"""Run methods with calibration data: one decoder block after the other, on the outputs of those before."""
