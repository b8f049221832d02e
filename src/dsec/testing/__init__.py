"""What back-ends are tested with: contract suites and fakes. Shipped, so that a third party can run them."""
