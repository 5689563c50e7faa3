"""The native service over gRPC: the same admission, bounds and keys as over HTTP. Needs the extra `grpc`.

in: messages of bough.proto. out: the same. never: separate rules about what a request may contain.

`bough_pb2*` are generated, with the oldest grpcio-tools whose code the installed protobuf may be newer than:

    python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. bough/entrypoints/grpc/bough.proto
"""
