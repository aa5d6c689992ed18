"""The endpoints of the OpenAI protocol that need the model: texts, chats, vectors, tokens."""
