"""Stages that survive anything."""
