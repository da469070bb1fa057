"""pywa, a WhatsApp client by others, unchanged: only its connections are led to the fake Graph API.

    pywa_client.py URL ACCOUNT TOKEN APP_SECRET < commands, one JSON document a line

{"send": [TO, TEXT]}           -> {"sent": ID} or {"error": [CLASS, CODE]}
{"posted": [BODY, SIGNATURE]}  -> {"refused": STATUS} or {"understood": [[KIND, ID, WHO, WHAT], ...]}
"""

import json
import logging
import sys

import httpx
from pywa import WhatsApp, errors, types

url, account, token, app_secret = sys.argv[1:]
logging.disable(logging.ERROR)


class Led(httpx.HTTPTransport):
    """Takes every request to one host."""

    def handle_request(self, request):
        to = httpx.URL(url)
        request.url = request.url.copy_with(scheme=to.scheme, host=to.host, port=to.port)
        return super().handle_request(request)


client = WhatsApp(
    phone_id=account,
    token=token,
    session=httpx.Client(transport=Led()),
    app_secret=app_secret,
    api_version=23.0,
)
understood = []


@client.on_message
def on_message(_, message: types.Message):
    understood.append(["message", message.id, message.from_user.wa_id, message.text])


@client.on_message_status
def on_status(_, status: types.MessageStatus):
    understood.append(["status", status.id, status.from_user.wa_id, status.status.value])


def answer(command):
    match command:
        case {"send": [to, text]}:
            try:
                return {"sent": client.send_message(to, text).id}
            except errors.WhatsAppError as error:
                return {"error": [type(error).__name__, error.code]}
        case {"posted": [body, signature]}:
            if refused := client.webhook_update_validator(body.encode(), signature):
                return {"refused": refused[1]}
            understood.clear()
            client.webhook_update_handler(body.encode())
            return {"understood": understood}
    raise ValueError(command)


for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), flush=True)
