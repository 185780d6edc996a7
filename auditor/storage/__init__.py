"""The ledger: every record and judgement, durable before it is acknowledged, chained by hash.

One writer (`ledger.Ledger`), any number of readers (`reader.Reader`), over SQLite or PostgreSQL.
"""
