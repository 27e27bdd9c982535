//! Requests and responses of HTTP/1.1, and the connections that carry them.

pub(crate) mod client;
pub(crate) mod connection;
pub(crate) mod dial;
pub(crate) mod helper;
pub(crate) mod message;
pub(crate) mod pace;
pub(crate) mod proxy;
pub(crate) mod retry;
