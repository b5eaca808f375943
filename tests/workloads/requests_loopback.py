import http.server
import threading

import requests


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"pong")

    def log_message(self, *args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
assert requests.get("http://127.0.0.1:%d/" % server.server_port, timeout=10).text == "pong"
assert requests.get("http://localhost:%d/" % server.server_port, timeout=10).text == "pong"
server.shutdown()
print("ok requests_loopback")
