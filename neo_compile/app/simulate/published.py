"""The paper's figures as numbers, read off its plots: gains over device-only, and load-latency curves.

NEO: Jiang et al., MLSys 2025, arXiv 2411.01142.
"""

from __future__ import annotations

# Online, seconds per token by requests per second: T4, Llama-2-7B, lengths of OSC.
T4_LATENCY = {
    "device-only": {0.2: 0.08, 0.4: 0.14, 0.5: 0.45},
    "neo": {0.5: 0.12, 1.5: 0.18, 2.5: 0.28, 3.1: 0.42, 3.3: 0.54, 3.5: 1.03, 3.7: 1.53},
}
# Online, the highest rate within a latency over device-only's: (trace, seconds per token, gain).
LATENCY_GAINS = {
    "t4": ("osc", 1.0, 6.63),
    "a10g-8xlarge": ("azure-code", 2.0, 1.064),
    "h100": ("azure-code", 2.0, 1.143),
}
# Offline, the best over output lengths.
BEST_GAINS = {"t4": 7.5, "a10g-8xlarge": 1.26, "h100": 1.14}
# Offline, prompts of 1,000 tokens, by output length.
CPU_GAINS = {
    "a10g-2xlarge": {50: 1.04, 100: 1.12, 200: 1.07, 300: 1.04, 400: 1.02},
    "a10g-4xlarge": {50: 1.03, 100: 1.13, 200: 1.08, 300: 1.04, 400: 1.02},
    "a10g-8xlarge": {50: 1.04, 100: 1.30, 200: 1.23, 300: 1.16, 400: 1.10},
    "a10g-16xlarge": {50: 1.04, 100: 1.30, 200: 1.74, 300: 1.79, 400: 1.47},
}
