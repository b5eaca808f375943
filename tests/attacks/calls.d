// Runs the system calls of its arguments, see SYSCALLS in tests/exec_attacks.py.
import core.stdc.errno, std.algorithm, std.array, std.conv, std.stdio;

extern (C) long syscall(long number, ...);

void main(string[] args) {
    foreach (row; args[1 .. $]) {
        auto fields = row.split("|");
        long[6] values;
        ubyte[][] kept;
        foreach (n, field; fields[3 .. $]) {
            if (field[0] == '@' || field[0] == '#') { // @text, or a page of zeros
                auto bytes = new ubyte[4096];
                bytes[0 .. field.length - 1] = cast(const(ubyte)[]) field[1 .. $];
                kept ~= bytes;
                values[n] = cast(long) bytes.ptr;
            } else
                values[n] = field.to!long;
        }
        errno = 0;
        const got = syscall(fields[1].to!long, values[0], values[1], values[2], values[3], values[4], values[5]);
        const number = got < 0 ? errno : 0;
        const refused = fields[2].split(",").canFind(number.to!string);
        writefln(`{"attack": "%s", "outcome": "%s", "detail": "%d, errno %d"}`, fields[0], refused ? "blocked" : "escaped", got, number);
        stdout.flush();
    }
}
