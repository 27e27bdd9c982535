//! The tests of what callers see, a file for each subject, and one program for all, since each more takes seconds to build.

mod answers;
mod files;
mod of_hyper;
mod server;
mod words;
