"""Recipes with clients on other machines: servers, clients, NVFlare jobs and their event log."""
