"""The clock: faster inference, latency tables measured on a device, and benchmarks."""
