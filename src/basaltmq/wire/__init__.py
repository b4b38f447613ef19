"""Protobuf messages of the gRPC services, generated from `proto/`. Do not edit."""
