import asyncio
import sys


async def main():
    shell = await asyncio.create_subprocess_shell("echo out; echo err >&2; exit 3", stdout=-1, stderr=-1)
    assert await shell.communicate() == (b"out\n", b"err\n")
    assert shell.returncode == 3
    python = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(input())", stdin=-1, stdout=-1)
    assert (await python.communicate(b"hi\n"))[0] == b"hi\n"
    server = await asyncio.start_server(lambda r, w: (w.write(b"pong"), w.close()), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    assert await reader.read() == b"pong"
    writer.close()
    server.close()


asyncio.run(main())
print("ok asyncio_subprocess")
