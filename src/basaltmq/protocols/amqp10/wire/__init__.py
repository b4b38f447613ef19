"""AMQP 1.0 on the wire: types, frames, performatives, messages, errors. No I/O."""
