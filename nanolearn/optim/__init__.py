"""Muon and AdamW in one optimizer, and the schedules that drive it."""
