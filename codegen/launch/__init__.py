"""Writes files that start a training where people have their machines: Slurm, Kubernetes, …"""
