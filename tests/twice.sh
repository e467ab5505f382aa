#!/bin/sh
# sh tests/twice.sh PART PYTEST OPTIONS...
# Tests that fail beside others run a second time: alone, one after the other. Who fails then has failed.
# Exit codes of pytest: 1 is failed tests, all others (an interruption, an error, no tests) end this at once.
part=$1
shift
cache=.pytest_cache/$part
rm -rf "$cache"
"$@" -o cache_dir="$cache"
code=$?
[ $code -eq 1 ] || exit $code

echo "=== $part: tests failed. A second run, of these alone, decides:"
"$@" -o cache_dir="$cache" -n 0 --dist no -vv --last-failed --last-failed-no-failures none || exit
echo "=== $part: the tests above failed beside others and passed alone."
