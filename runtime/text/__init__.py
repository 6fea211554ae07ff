"""Prompts to ids, ids to text, chats to prompts."""
