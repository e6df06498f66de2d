# The engine half of a server as they are split today: it gets requests and gives tokens over ZeroMQ, and runs steps of the
# stand-in libnvinfer, for several models on a thread each. A token's text says which thread and which of its steps made it.
import ctypes
import sys
import threading

import zmq

# Slot of enqueueV3 in the vtable of TensorRT 10's execution context.
ENQUEUE_V3 = 37

cuda = ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
nvinfer = ctypes.CDLL("libnvinfer.so.10", ctypes.RTLD_GLOBAL)
nvinfer.standin_create_context.restype = ctypes.c_void_p
nvinfer.standin_set_step.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint64]


def check(code):
    assert code == 0, f"CUDA error {code}"


class Engine:
    """An execution context with a stream, of the calling thread."""

    def __init__(self, primary, gpu_ns):
        check(cuda.cuCtxSetCurrent(primary))
        self.stream = ctypes.c_void_p()
        check(cuda.cuStreamCreate(ctypes.byref(self.stream), 1))
        self.context = ctypes.c_void_p(nvinfer.standin_create_context())
        nvinfer.standin_set_step(self.context, gpu_ns, 4, 20_000)
        # nvinfer1::IExecutionContext: a vtable, and the object that does the work, which has one, too.
        self.inner = ctypes.cast(self.context, ctypes.POINTER(ctypes.c_void_p))[1]
        table = ctypes.cast(self.inner, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)))[0]
        enqueue = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p)
        self.enqueue_v3 = enqueue(table[ENQUEUE_V3])

    def step(self):
        assert self.enqueue_v3(self.inner, self.stream)
        check(cuda.cuStreamSynchronize(self.stream))


def serve(primary, address, gpu_ns):
    engine = Engine(primary, gpu_ns)
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(address)
    tid, step, running = threading.get_native_id(), 0, {}
    while True:
        while not running or socket.poll(0):
            name, count = socket.recv_multipart()
            running[name] = [0, int(count)]
        engine.step()
        step += 1
        for name, progress in list(running.items()):
            progress[0] += 1
            last = progress[0] == progress[1]
            socket.send_multipart([name, b"%d:%d" % (tid, step), b"1" if last else b"0"])
            if last:
                del running[name]


def busy(primary):
    """An engine that nobody asks anything."""
    engine = Engine(primary, 500_000)
    while True:
        engine.step()


def main():
    check(cuda.cuInit(0))
    primary = ctypes.c_void_p()
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(primary), 0))
    print("ready", flush=True)
    if sys.argv[1:] == ["busy"]:
        busy(primary)
    for address, gpu_ns in zip(sys.argv[1:], (2_000_000, 3_300_000)):
        threading.Thread(target=serve, args=(primary, address, gpu_ns)).start()


main()
