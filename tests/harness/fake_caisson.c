// Stands in for libcaisson.so: forks once per packet, with the four descriptors that came along and nothing confined.
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

int caisson_zygote_prepare(long rseq_offset, unsigned rseq_size) { (void)rseq_offset; (void)rseq_size; signal(SIGCHLD, SIG_IGN); return 0; }

int caisson_zygote_ready(int sock, const char *report) { return (int)send(sock, report, strlen(report), 0); }

void caisson_zygote_await_release(void) {}

long caisson_zygote_serve(int sock) {
    for (;;) {
        char byte, space[CMSG_SPACE(5 * sizeof(int))];
        struct iovec part = {&byte, 1};
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
        if (recvmsg(sock, &message, 0) <= 0) return -1;
        int fds[5];
        memcpy(fds, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fds);
        if (fork() == 0) {
            signal(SIGCHLD, SIG_DFL);
            for (int i = 0; i < 5; i++) dup2(fds[i], 100 + i);
            for (int i = 0; i < 5; i++) dup2(100 + i, i);
            for (int fd = 5; fd < 200; fd++) close(fd);
            return 0;
        }
        for (int i = 0; i < 5; i++) close(fds[i]);
    }
}
