// Runs the system calls of its arguments, see SYSCALLS in tests/exec_attacks.py.
package main

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"unsafe"
)

func main() {
	for _, row := range os.Args[1:] {
		fields := strings.Split(row, "|")
		nr, _ := strconv.ParseInt(fields[1], 10, 64)
		var values [6]uintptr
		var kept [][]byte
		for n, field := range fields[3:] {
			value, err := strconv.ParseInt(field, 10, 64)
			values[n] = uintptr(value)
			if err != nil { // @text, or # for a page of zeros
				bytes := make([]byte, 4096)
				copy(bytes, field[1:])
				values[n] = uintptr(unsafe.Pointer(&bytes[0]))
				kept = append(kept, bytes)
			}
		}
		got, _, errno := syscall.RawSyscall6(uintptr(nr), values[0], values[1], values[2], values[3], values[4], values[5])
		runtime.KeepAlive(kept)
		outcome := "escaped"
		if strings.Contains(","+fields[2]+",", fmt.Sprintf(",%d,", errno)) {
			outcome = "blocked"
		}
		fmt.Printf("{\"attack\": \"%s\", \"outcome\": \"%s\", \"detail\": \"%d, errno %d\"}\n", fields[0], outcome, int64(got), errno)
	}
}
