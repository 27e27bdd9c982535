//! Responses as hyper reads them, without a server, for the tests and for the fuzz target `answers`.

use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::client::conn::http1;

/// A connection in memory. The response can be read once something was written.
struct Wire<'a> {
    answer: &'a [u8],
    is_asked: bool,
}

impl hyper::rt::Read for Wire<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        mut dest: hyper::rt::ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.is_asked {
            return Poll::Pending;
        }
        let (now, later) = self.answer.split_at(self.answer.len().min(dest.remaining()));
        dest.put_slice(now);
        self.answer = later;
        Poll::Ready(Ok(()))
    }
}

impl hyper::rt::Write for Wire<'_> {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.is_asked = true;
        Poll::Ready(Ok(bytes.len()))
    }
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

struct NoBody;

impl Body for NoBody {
    type Data = Bytes;
    type Error = io::Error;
    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        Poll::Ready(None)
    }
    fn is_end_stream(&self) -> bool {
        true
    }
}

/// Return status and body of a response as hyper reads them.
pub(crate) fn of_hyper(answer: &[u8]) -> Result<(u16, Vec<u8>), String> {
    let mut context = Context::from_waker(Waker::noop());
    let wire = Wire {
        answer,
        is_asked: false,
    };
    let mut builder = http1::Builder::new();
    let mut handshake = pin!(builder.max_headers(256).handshake::<_, NoBody>(wire));
    let Poll::Ready(Ok((mut sender, connection))) = handshake.as_mut().poll(&mut context) else {
        panic!("hyper waits for nothing");
    };
    let mut connection = pin!(connection);
    let mut is_over = false;
    let request = http::Request::get("/x").header("Host", "h").body(NoBody).unwrap();
    let mut response = pin!(sender.send_request(request));
    let (mut body, mut bytes, mut status): (Option<Incoming>, _, _) = (None, Vec::new(), 0);
    for _ in 0..10_000 {
        if !is_over {
            is_over = connection.as_mut().poll(&mut context).is_ready();
        }
        let frame = match &mut body {
            Some(body) => Pin::new(body).poll_frame(&mut context),
            None => {
                if let Poll::Ready(head) = response.as_mut().poll(&mut context) {
                    let head = head.map_err(|error| error.to_string())?;
                    status = head.status().as_u16();
                    body = Some(head.into_body());
                }
                Poll::Pending
            }
        };
        match frame {
            Poll::Ready(None) => return Ok((status, bytes)),
            Poll::Ready(Some(Err(error))) => return Err(error.to_string()),
            Poll::Ready(Some(Ok(frame))) => bytes.extend(frame.into_data().unwrap_or_default()),
            Poll::Pending => {}
        }
    }
    Err("it would wait for more".to_owned())
}
